class InputError(ValueError):
    """A mistake in what the user gave (a file, a folder, a value), told in one message that says what would be right."""
