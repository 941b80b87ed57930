"""The console: a web page that shows a run's progress, its waits, and the model's answers."""
