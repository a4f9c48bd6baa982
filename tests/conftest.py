"""Settings of the whole suite."""

import os

import torch

# Small operators on several threads crawl when anything runs beside them, and tests compare bits.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)
