"""Pools inside the libraries that run models. Each file imports its library; this one none."""
