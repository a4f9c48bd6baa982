"""The study of false alarms: what the monitors say of runs with nothing wrong."""
