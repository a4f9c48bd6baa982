"""Models, data and scenarios. May import everything; nothing but the command line imports it."""
