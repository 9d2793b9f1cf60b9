"""Three small corpora of one company, and questions about each."""

from functools import cache

from rgate_integrations import CorpusProfile

TEXTS = {
    "logger": [
        "The Acme X200 data logger records temperature and humidity every 10 seconds.",
        "To pair the X200 with the phone app, hold the blue button for five seconds until the LED blinks.",
        "Error E42 of the X200 means that the memory card is write-protected or full.",
        "The X200 exports measurements as CSV over USB-C; select Export in the menu.",
        "Replace the two AA batteries of the X200 when the display shows BAT LOW.",
        "The X200 firmware is updated from a memory card: copy firmware.bin and hold the reset button.",
        "The probe of the X200 measures from -40 to 125 degrees Celsius, with an accuracy of 0.3 degrees.",
        "The logging interval of the X200 is set in the menu Settings, Interval, between 1 second and 1 hour.",
    ],
    "leave": [
        "Employees have 28 days of annual leave a year, which are requested in the staff portal.",
        "Up to five days of unused annual leave may be carried over into the next year until 31 March.",
        "Parental leave is granted for up to 12 months; tell the personnel office eight weeks before.",
        "On the third day of sick leave a doctor's certificate must be handed in to the personnel office.",
        "Special leave of one day is granted for moving house, and of two days for a wedding.",
        "Overtime is compensated by time off within six months, after approval by the line manager.",
        "Part-time employees have annual leave in proportion to their weekly working days.",
        "Who falls ill during annual leave gets these days back with a doctor's certificate.",
    ],
    "canteen": [
        "The canteen serves lunch from 11:30 to 14:00, and coffee and cake until 16:00.",
        "On Wednesdays the canteen has fresh fish; every day there is a vegan main dish.",
        "Guests pay 9 euros for lunch in the canteen, employees 4.50 euros with their badge.",
        "Allergens of each dish are on the board beside the counter of the canteen.",
        "The menu of the canteen for the next week is published on Friday at noon.",
        "Badges are charged at the machine beside the entrance of the canteen, in cash or by card.",
        "Leftover meals of the canteen are sold in boxes for 2 euros from 14:00 on.",
        "Tables for more than ten people are reserved in the canteen by phone, a day ahead.",
    ],
}
QUESTIONS = {
    "logger": "How do I pair the X200 data logger with the phone app?",
    "leave": "How many days of annual leave can an employee carry over into the next year?",
    "canteen": "What does a guest pay for lunch in the canteen?",
}


@cache
def profiles():
    """Return the profile of each corpus, by its name; the encoder reads them once."""
    return {name: CorpusProfile.from_texts(texts, name=name) for name, texts in TEXTS.items()}
