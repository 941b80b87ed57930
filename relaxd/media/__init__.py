"""Content of conversations: messages, images, video and sound.

`messages` is for rewards. The other modules bring media from the data to the model: `placeholders` finds them in
prompts; `sources`, `images`, `videos` and `sounds` read and normalise them; `kinds` lists the kinds and caches opened
media; `media_tokens` computes their tokens' places; `prompt_media` stores them with a group; `patches` makes the inputs
of the model's towers.
"""
