"""The sub-commands of ``hf-lance-stream``: in each module `add` adds its parser, `run` runs it."""
