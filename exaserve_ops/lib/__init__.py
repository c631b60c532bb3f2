"""The kernel: what every layer may use and that uses none of them."""
