"""The HTTP face that engines of ours share: OpenAI's routes, health, metrics, drain."""
