"""`python -m evoengine`"""

from evoengine.cli.main import main

if __name__ == "__main__":
    main()
