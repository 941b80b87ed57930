"""Content of conversations: messages, images, video and sound.

`messages` has the form for rewards. The other modules prepare media of the data for the model: `placeholders` finds
them in prompts; `sources`, `images`, `videos` and `sounds` read and normalise them; `kinds` lists the kinds and caches
opened media; `media_tokens` lays out their tokens; `prompt_media` stores them with a group; `patches` makes the inputs
of the model's towers.
"""
