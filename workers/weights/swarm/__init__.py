"""Pieces of weights from node to node, as the control plane planned it.

A node pulls each stripe from one parent over a kept HTTP connection: one request names the pieces that
it misses, and the parent answers with every one of them as soon as it has verified it itself. So a piece
is on its way to the next node while the rest is still to come, and no round trip is paid for it.
"""
