"""What each member of a federation contributes to each other member, by training among coalitions of them."""
