"""Stand-ins for packages that a machine may lack. This folder goes last on the path, after installed packages."""
