"""The whole product on one machine: what `manage.py up` starts, in which order, and how it ends."""
