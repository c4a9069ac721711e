"""What connectors of serving engines share: settings, a rank's endpoints, its numbers. One folder
for each engine, and nothing outside it imports that engine.
"""
