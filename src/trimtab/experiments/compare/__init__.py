"""Policies under one budget: arms and seeds on the same data, order and faults; a table, JSON and a plot of them."""
