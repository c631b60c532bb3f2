"""SGLang: how it is launched and read."""
