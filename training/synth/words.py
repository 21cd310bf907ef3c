"""Word banks shared by the generators."""

FIRST = (
    "Anna Ben Clara David Elena Felix Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paula Quentin Rosa Samuel Tina "
    "Umar Vera Walter Xenia Yusuf Zoe Alice Bruno Chloe Diego Emma Farid Gina Hugo Isla Jonas Kira Liam Mona Noah Olga "
    "Peter Ruth Simon Tara Victor Wendy Yara Adam Bella Carl Dora Ethan Fiona George Hana Ivan Julia Kevin Lucy Marco "
    "Nadia Owen Priya Rahul Sofia Thomas Ursula Vincent Mei Kenji Aisha Omar Ingrid Lars Pablo Lucia Anton"
).split()
LAST = (
    "Smith Brown Miller Davis Wilson Moore Taylor Clark Lewis Walker Hall Young King Wright Scott Green Baker Adams "
    "Nelson Carter Mitchell Turner Parker Evans Collins Stewart Morris Rogers Reed Cook Morgan Bell Murphy Bailey "
    "Rivera Cooper Cox Howard Ward Torres Peterson Gray Ramirez James Watson Brooks Kelly Sanders Price Bennett Wood "
    "Barnes Ross Henderson Coleman Jenkins Perry Powell Long Patterson Hughes Flores Meyer Fischer Weber Novak Silva "
    "Rossi Kim Chen Singh Patel Tanaka Larsen"
).split()
ADJECTIVES = (
    "blue silent golden amber crimson hidden frozen ancient bright broken calm clever cold copper dark distant dusty "
    "early eager emerald empty faded fast final fragile gentle giant glass gray green happy heavy hollow honest humble "
    "icy iron ivory jolly large late lazy little lonely loud lucky marble misty modern narrow noble northern orange "
    "pale patient plain proud purple quick quiet rapid red rough round royal rusty sandy scarlet secret sharp shiny "
    "silver simple sleepy small smooth soft southern spare steady steep stone stormy strong sunny swift tall tidy tiny "
    "velvet violet warm western white wide wild winter wise wooden yellow young"
).split()
NOUNS = (
    "harbor falcon garden river mountain lantern bridge castle forest meadow island tower valley engine anchor arrow "
    "badger beacon bear bell bottle canyon canvas candle carpet cedar circle clock cloud comet coral cottage crane "
    "crow crystal desert dolphin dragon drum eagle ember feather ferry fox gate glacier hammer hawk heron hill horizon "
    "horse kettle kite ladder lake leaf lion lizard maple market mill mirror moon needle oak ocean orchard otter owl "
    "palace panther parrot pebble pepper piano pine pilot planet pony prairie quarry rabbit raven reef ribbon robin "
    "rocket saddle sail salmon shadow shell ship signal sparrow spring squirrel star station storm stream summit swan "
    "table temple tiger trail tree tunnel turtle violin wagon walrus whale willow window wolf wren zebra"
).split()
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Helsinki Athens Cairo Nairobi Lagos Accra "
    "Tokyo Osaka Seoul Beijing Shanghai Delhi Mumbai Bangkok Hanoi Jakarta Manila Sydney Melbourne Auckland Toronto "
    "Vancouver Montreal Boston Chicago Denver Seattle Houston Miami Atlanta Phoenix Dallas Lima Bogota Quito Santiago "
    "Havana Istanbul Ankara Tehran Dubai Doha Zurich Geneva Munich Hamburg Milan Naples Barcelona Porto Lyon Kyiv Riga"
).split()
HELD_CITIES = (
    "Stockholm Copenhagen Budapest Brussels Amsterdam Kyoto Singapore Nashville Valencia Krakow Casablanca".split()
)
ITEMS = (
    "apples bananas oranges pears grapes lemons eggs bottles pencils notebooks chairs tables lamps books shirts shoes "
    "tickets coins stamps cups plates spoons forks bags boxes cards keys candles batteries ropes nails screws bricks"
).split()
COLORS = "red blue green yellow purple orange black white brown pink gray silver gold violet turquoise".split()
JOBS = (
    "teacher nurse engineer baker farmer pilot lawyer chemist painter driver cook librarian carpenter doctor dentist "
    "journalist plumber gardener tailor electrician musician designer accountant mechanic"
).split()
PRODUCTS = (
    "laptop phone keyboard monitor printer camera headset router tablet speaker charger microphone bicycle backpack "
    "kettle toaster blender heater vacuum fan lamp desk sofa mattress jacket watch drone scanner"
).split()
TOPICS = (
    "history music physics chess football gardening cooking painting sailing astronomy biology economics poetry travel "
    "photography robotics geology climate medicine law architecture swimming cycling hiking"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
