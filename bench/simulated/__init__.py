"""A cluster in simulated time: the real router core, or the real scheduler, with workers that are formulas."""
