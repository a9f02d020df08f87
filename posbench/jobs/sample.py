"""`posbench sample RUN`: a few lines by the model, so that a person sees what it learned."""

from __future__ import annotations

from pathlib import Path

from posbench.errors import UserError
from posbench.runs import load_run


def run_sample(
    folder: Path, prompt: str | None, tokens: int, temperature: float, seed: int
) -> None:
    """Print `tokens` tokens continuing the prompt, or the start of a test document."""
    run = load_run(folder)
    print(sample(run.folder, prompt or "import ", tokens, temperature, seed))


def sample(folder: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation; the model sees at most its training length at a time."""
    import torch

    from posbench.tokenizer import load_tokenizer

    if tokens < 1:
        raise UserError(f"tokens={tokens} is too small; the least is 1.")
    if temperature < 0:
        raise UserError(f"temperature={temperature} is negative; 0 takes the likeliest token.")
    run = load_run(folder)
    model, tokenizer = run.model(), load_tokenizer(run.tokenizer_json())
    generator = torch.Generator().manual_seed(seed)
    ids = [int(token) for token in tokenizer.encode([prompt])[0]]
    if not ids:
        raise UserError("prompt is empty; give at least one character.")
    with torch.inference_mode():
        for _ in range(tokens):
            window = torch.tensor([ids[-run.settings.context :]])
            logits = model(window, last=1)[0, 0].float()
            if temperature == 0:
                ids.append(int(logits.argmax()))
                continue
            shares = (logits / temperature).softmax(-1)
            ids.append(int(torch.multinomial(shares, 1, generator=generator)))
    return tokenizer.decode(ids)
