"""`posbench sample RUN`: a few lines by the model, so that a person sees what it learned."""

from __future__ import annotations

from pathlib import Path

from posbench.config.tasks import TaskConfig
from posbench.corpus import load_corpus, split_documents
from posbench.errors import UserError
from posbench.runs import Run, load_run

TOKENS = 200  # written unless asked otherwise
START_CHARACTERS = 40  # of a test document's first line


def run_sample(
    folder: Path,
    prompt: str | None,
    tokens: int | None,
    temperature: float,
    seed: int,
    plugins_changed: bool = False,
) -> None:
    """Print `tokens` tokens continuing the prompt; None starts like a test document or example."""
    if tokens is not None and tokens < 1:
        raise UserError(f"tokens={tokens} is too small; the least is 1.")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature} must be 0 or a positive number.")
    if prompt == "":
        raise UserError("prompt is empty; give at least one character, or leave it out.")
    run = load_run(folder, plugins_changed=plugins_changed)
    if prompt is None and isinstance(run.settings.data, TaskConfig):
        prompt, answer = question(run)
        tokens = tokens or answer
    elif prompt is None:
        prompt = document_start(run)
    print(sample(run, prompt, tokens or TOKENS, temperature, seed))


def question(run: Run) -> tuple[str, int]:
    """The first test example of the run's task, at the longest length trained, to its answer.

    Also how many tokens of the answer come next.
    """
    from posbench.tasks import TaskDataset

    config = run.settings.data
    assert isinstance(config, TaskConfig)
    dataset = TaskDataset(config)
    examples = dataset.examples("test", config.longest(run.settings.context), 1)
    marks = [bool(mark) for mark in examples.is_answer[0]]
    first = marks.index(True)
    answer = [*marks[first:], False].index(False)
    return dataset.tokenizer.decode(examples.tokens[0, :first].tolist()), answer


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
    try:
        ids = [int(token) for token in tokenizer.encode([prompt])[0]]
    except ValueError as error:  # words of a task
        raise UserError(f"prompt={prompt}: {error} of data={run.settings.data.name}.") from None
    if not ids:
        raise UserError("prompt holds no word.")
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
