"""What clients lose by kills, seen by an open-loop load: the parts of `bench.kills`."""
