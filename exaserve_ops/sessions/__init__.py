"""Conversations: who holds them, and what they used."""
