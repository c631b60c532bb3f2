"""What tiny engines of one model share: a note, read before they are forked."""

from __future__ import annotations

import os
import threading

NOTES: list[str] = []


def prepare(digest: str, trouble: str) -> None:
    """Take a note of the process and the model, after the trouble that was asked for."""
    if trouble == "fails":
        raise RuntimeError("the note cannot be read")
    if trouble == "leaves a thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    NOTES.append(f"{os.getpid()} {digest}")
