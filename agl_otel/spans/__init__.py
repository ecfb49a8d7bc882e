"""Read what spans hold: model calls and their messages in every dialect, attributes, rewards, emitted objects. Pure."""
