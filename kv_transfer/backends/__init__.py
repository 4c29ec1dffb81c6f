"""The ways in which pages move between two arenas, behind one pair of ports;
`registry.py` is the only place that loads them.
"""
