"""How processes of rankwise speak to each other: agents over a channel, an agent and its ranks through a shared page."""
