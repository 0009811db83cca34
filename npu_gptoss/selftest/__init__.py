"""What a card has to show before it is trusted: the calls that serving makes, in all their forms, against fp32."""
