"""Four objectives: rebuild from few symbols, guess the hidden ones, guess the next one, find the text that belongs."""
