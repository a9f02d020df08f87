"""What every test shares: nothing is written outside pytest's temporary folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny


@pytest.fixture(autouse=True, scope="session")
def _private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches and outputs go to a folder of this test session, never to the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("POSBENCH_OUTPUTS", str(tmp_path_factory.mktemp("outputs")))
        yield


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sweep and its evaluation (`tiny.sweep`), made once; who changes it takes a copy."""
    return tiny.sweep(tmp_path_factory.mktemp("swept"))
