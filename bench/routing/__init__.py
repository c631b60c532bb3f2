"""How policies of routing compare on a trace, in virtual time: `python -m bench.routing TRACE --json`."""
