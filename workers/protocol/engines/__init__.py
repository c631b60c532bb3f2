"""What both sides know of engines: their options, what each is for, and which versions have it."""
