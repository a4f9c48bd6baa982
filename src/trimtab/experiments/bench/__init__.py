"""What trimtab costs on this machine, as ratios of one run; the scripts in benchmarks/ measure the same at any size."""
