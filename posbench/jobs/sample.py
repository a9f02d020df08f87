"""`posbench sample RUN`: a few lines by the model, so that a person sees what it learned."""

from __future__ import annotations

from pathlib import Path

from posbench.corpus import load_corpus, split_documents
from posbench.errors import UserError
from posbench.runs import Run, load_run

START_CHARACTERS = 40  # of a test document's first line


def run_sample(
    folder: Path,
    prompt: str | None,
    tokens: int,
    temperature: float,
    seed: int,
    plugins_changed: bool = False,
) -> None:
    """Print `tokens` tokens continuing the prompt; None starts like a test document."""
    if tokens < 1:
        raise UserError(f"tokens={tokens} is too small; the least is 1.")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature} must be 0 or a positive number.")
    if prompt == "":
        raise UserError("prompt is empty; give at least one character, or leave it out.")
    run = load_run(folder, plugins_changed=plugins_changed)
    start = document_start(run) if prompt is None else prompt
    print(sample(run, start, tokens, temperature, seed))


def document_start(run: Run) -> str:
    """The first line of the first test document of the run's corpus, cut short."""
    data = run.settings.data
    try:
        document = split_documents(load_corpus(data), data)["test"][0]
    except UserError as error:
        raise UserError(f"{error} Without that text, give prompt=TEXT.") from error
    line = next(line for line in document.text.splitlines() if line.strip())
    return line[:START_CHARACTERS]


def sample(run: Run, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation; the model sees at most its training length at a time."""
    import torch

    from posbench.tokenizer import load_tokenizer

    model, tokenizer = run.model(), load_tokenizer(run.tokenizer_json())
    generator = torch.Generator().manual_seed(seed)
    ids = [int(token) for token in tokenizer.encode([prompt])[0]]
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
