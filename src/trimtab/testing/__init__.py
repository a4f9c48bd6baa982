"""Contract suites that third parties can run against their own recipes, monitors and policies."""
