"""The fault experiment: what each monitor says of each injected fault, and how long before the loss does."""
