"""What connectors share, and a folder for each engine: nothing outside it imports that engine."""
