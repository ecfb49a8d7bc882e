"""Read what spans hold: attributes, rewards, emitted messages and objects. Pure."""
