"""Rules of validation, pure."""
