"""Settings of the whole suite."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Small operators on several threads crawl when anything runs beside them, and tests compare bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def start_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Runs a test file as a script on several ranks, ``file rank folder``, and gives the folder they wrote to."""

    def start(script: str, num_ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(folder)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert [process.returncode for process in ranks] == [0] * num_ranks, "\n".join(outputs)
        return folder

    return start
