"""Files of prompts as sequences of rows, of which only those in use are in memory."""
