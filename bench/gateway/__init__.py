"""`python -m bench.gateway --json`: the gateway beside other routers and proxies, in one run.

One core is for the proxy under test, another for load, mock engines and Redis. Each contender gets the
same requests, with a key and a session header, over kept-alive connections. Rounds are interleaved (A B
A B), so that what else the machine does falls on all alike; medians and spread are told.
"""
