"""The mathematics: arrays in, arrays out, each function with its formula."""
