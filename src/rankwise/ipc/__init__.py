"""How processes of rankwise communicate: agents over a channel, an agent with its ranks through a shared page."""
