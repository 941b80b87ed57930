"""The console: a web page that shows what a run does, why it waits, and what the model wrote."""
