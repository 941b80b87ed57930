"""HTTP protocols in which programs request the model's messages, one file each."""
