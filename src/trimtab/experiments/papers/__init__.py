"""The experiments of Kong et al. 2026 in small: one file an experiment, its scenarios and tables as data."""
