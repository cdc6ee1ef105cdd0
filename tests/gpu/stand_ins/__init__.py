"""Modules that stand in for packages a machine may lack; this folder goes last on the path, after what is installed."""
