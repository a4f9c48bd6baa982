"""From run records to what a person looks at."""
