"""Files of prompts as sequences of rows. Only the rows in use are in memory."""
