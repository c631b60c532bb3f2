"""Code that runs inside engines that are no part of this product, in their own interpreters.

Each package in here is put on such an engine's path by the file that starts it, and imported there under
its own short name: standard library only, nothing of this product outside its folder.
"""
