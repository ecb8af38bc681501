"""Ten lessons that check themselves: ``lab learn`` (cli.py), the table of lessons in course.py."""
