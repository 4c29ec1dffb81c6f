"""Which names of the standard library the demo model knows.

By prefix; the empty one stands for the builtins. A name that the running interpreter lacks, or that
has no docstring, is skipped.
"""

NAMES: dict[str, str] = {
    "": """abs aiter all anext any ascii bin bool breakpoint bytearray bytes callable chr
        classmethod compile complex delattr dict dir divmod enumerate eval exec filter float
        format frozenset getattr globals hasattr hash hex id input int isinstance issubclass iter
        len list locals map max memoryview min next object oct open ord pow print property range
        repr reversed round set setattr slice sorted staticmethod str sum tuple type vars zip""",
    "str": """capitalize casefold center count encode endswith expandtabs find format format_map
        index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric
        isprintable isspace istitle isupper join ljust lower lstrip maketrans partition
        removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split
        splitlines startswith strip swapcase title translate upper zfill""",
    "list": "append clear copy count extend index insert pop remove reverse sort",
    "dict": "clear copy fromkeys get items keys pop popitem setdefault update values",
    "set": """add clear copy difference difference_update discard intersection
        intersection_update isdisjoint issubset issuperset pop remove symmetric_difference union
        update""",
    "bytes": "decode fromhex hex",
    "int": "as_integer_ratio bit_count bit_length from_bytes to_bytes",
    "float": "as_integer_ratio fromhex hex is_integer",
    "os": """abort access chdir chmod chown close cpu_count dup execv fchmod fork fsdecode
        fsencode fsync get_exec_path get_terminal_size getcwd getenv getloadavg getlogin getpid
        getppid getuid isatty kill link listdir lseek lstat makedirs mkdir mkfifo nice open pipe
        putenv read readlink remove removedirs rename renames replace rmdir scandir sendfile stat
        statvfs strerror symlink sync system truncate umask uname unlink unsetenv urandom utime
        wait waitpid walk write""",
    "os.path": """abspath basename commonpath commonprefix dirname exists expanduser expandvars
        getatime getctime getmtime getsize isabs isdir isfile islink ismount join lexists
        normcase normpath realpath relpath samefile split splitdrive splitext""",
    "pathlib": "Path PurePath",
    "pathlib.Path": """absolute chmod cwd exists expanduser glob hardlink_to home is_dir is_file
        is_mount is_symlink iterdir joinpath lstat match mkdir open read_bytes read_text readlink
        relative_to rename replace resolve rglob rmdir samefile stat symlink_to touch unlink
        with_name with_stem with_suffix write_bytes write_text""",
    "shutil": """chown copy copy2 copyfile copyfileobj copymode copystat copytree disk_usage
        get_archive_formats get_terminal_size ignore_patterns make_archive move rmtree
        unpack_archive which""",
    "glob": "escape glob iglob",
    "fnmatch": "filter fnmatch fnmatchcase translate",
    "tempfile": """NamedTemporaryFile SpooledTemporaryFile TemporaryDirectory TemporaryFile
        gettempdir gettempprefix mkdtemp mkstemp""",
    "io": "BytesIO StringIO TextIOWrapper",
    "json": "JSONDecoder JSONEncoder dump dumps load loads",
    "csv": """DictReader DictWriter Sniffer field_size_limit list_dialects reader
        register_dialect writer""",
    "pickle": "dump dumps load loads",
    "struct": "calcsize iter_unpack pack pack_into unpack unpack_from",
    "zlib": "adler32 compress crc32 decompress",
    "gzip": "GzipFile compress decompress open",
    "zipfile": "ZipFile is_zipfile",
    "tarfile": "TarFile is_tarfile",
    "base64": """b16encode b32encode b64decode b64encode b85encode urlsafe_b64decode
        urlsafe_b64encode""",
    "binascii": "crc32 hexlify unhexlify",
    "hashlib": "file_digest new pbkdf2_hmac scrypt sha256",
    "hmac": "HMAC compare_digest digest new",
    "secrets": "choice compare_digest randbelow randbits token_bytes token_hex token_urlsafe",
    "uuid": "UUID getnode uuid1 uuid3 uuid4 uuid5",
    "math": """acos asin atan atan2 cbrt ceil comb copysign cos cosh degrees dist erf exp expm1
        fabs factorial floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt
        lcm ldexp lgamma log log10 log1p log2 modf nextafter perm pow prod radians remainder sin
        sinh sqrt tan tanh trunc ulp""",
    "statistics": """NormalDist correlation covariance fmean geometric_mean harmonic_mean
        linear_regression mean median median_grouped median_high median_low mode multimode pstdev
        pvariance quantiles stdev variance""",
    "random": """Random SystemRandom betavariate choice choices expovariate gauss getrandbits
        getstate randbytes randint random randrange sample seed setstate shuffle triangular
        uniform""",
    "decimal": "Context Decimal getcontext localcontext setcontext",
    "fractions": "Fraction",
    "itertools": """accumulate chain combinations combinations_with_replacement compress count
        cycle dropwhile filterfalse groupby islice pairwise permutations product repeat starmap
        takewhile tee zip_longest""",
    "functools": """cache cached_property cmp_to_key lru_cache partial partialmethod reduce
        singledispatch singledispatchmethod total_ordering update_wrapper wraps""",
    "operator": """attrgetter concat contains countOf index indexOf itemgetter length_hint
        methodcaller not_ truth""",
    "collections": """ChainMap Counter OrderedDict UserDict UserList UserString defaultdict deque
        namedtuple""",
    "collections.Counter": "elements most_common subtract update",
    "collections.deque": "append appendleft extend extendleft pop popleft rotate",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort_left insort_right",
    "queue": "LifoQueue PriorityQueue Queue SimpleQueue",
    "copy": "copy deepcopy",
    "array": "array",
    "weakref": """WeakKeyDictionary WeakMethod WeakValueDictionary finalize getweakrefcount proxy
        ref""",
    "re": "compile escape findall finditer fullmatch match purge search split sub subn",
    "string": "Formatter Template capwords",
    "textwrap": "TextWrapper dedent fill indent shorten wrap",
    "difflib": """Differ HtmlDiff SequenceMatcher context_diff get_close_matches ndiff restore
        unified_diff""",
    "html": "escape unescape",
    "unicodedata": "bidirectional category combining decimal digit lookup name normalize numeric",
    "shlex": "join quote split",
    "pprint": "PrettyPrinter isreadable isrecursive pformat pp pprint saferepr",
    "time": """asctime ctime get_clock_info gmtime localtime mktime monotonic monotonic_ns
        perf_counter perf_counter_ns process_time sleep strftime strptime thread_time time
        time_ns tzset""",
    "datetime": "date datetime time timedelta timezone tzinfo",
    "datetime.date": """ctime fromisoformat fromordinal fromtimestamp isocalendar isoformat
        isoweekday replace strftime today toordinal weekday""",
    "datetime.datetime": "astimezone combine now strptime timestamp utcoffset",
    "calendar": """Calendar HTMLCalendar TextCalendar calendar isleap leapdays month
        monthcalendar monthrange timegm weekday""",
    "timeit": "Timer repeat timeit",
    "subprocess": "Popen call check_call check_output getoutput getstatusoutput run",
    "signal": "alarm getsignal pause raise_signal setitimer signal sigwait strsignal",
    "threading": """Barrier BoundedSemaphore Condition Event Lock RLock Semaphore Thread Timer
        active_count current_thread enumerate excepthook get_ident get_native_id local
        main_thread setprofile settrace stack_size""",
    "threading.Thread": "is_alive join run start",
    "multiprocessing": """Lock Manager Pipe Pool Process Queue active_children cpu_count
        current_process freeze_support""",
    "concurrent.futures": """Executor Future ProcessPoolExecutor ThreadPoolExecutor as_completed
        wait""",
    "asyncio": """Barrier BoundedSemaphore Condition Event Future LifoQueue Lock PriorityQueue
        Queue Runner Semaphore StreamReader StreamWriter Task TaskGroup Timeout all_tasks
        as_completed create_subprocess_exec create_task current_task ensure_future gather
        get_event_loop get_running_loop iscoroutine iscoroutinefunction new_event_loop
        open_connection run run_coroutine_threadsafe set_event_loop shield sleep start_server
        start_unix_server timeout timeout_at to_thread wait wait_for wrap_future""",
    "contextlib": """AsyncExitStack ContextDecorator ExitStack aclosing asynccontextmanager chdir
        closing contextmanager nullcontext redirect_stderr redirect_stdout suppress""",
    "dataclasses": "asdict astuple dataclass field fields is_dataclass make_dataclass replace",
    "enum": "Enum Flag IntEnum IntFlag StrEnum auto unique verify",
    "abc": "ABC ABCMeta abstractmethod",
    "types": "MethodType ModuleType SimpleNamespace coroutine new_class",
    "typing": """NamedTuple TypeVar cast get_args get_origin get_type_hints overload
        runtime_checkable""",
    "inspect": """Parameter Signature cleandoc currentframe getcomments getdoc getmembers
        getmodule getmro getsource getsourcefile getsourcelines isabstract isawaitable isbuiltin
        isclass iscoroutine isfunction isgenerator ismethod ismodule isroutine signature stack
        unwrap""",
    "sys": """call_tracing displayhook exc_info excepthook exit getallocatedblocks
        getdefaultencoding getfilesystemencoding getprofile getrecursionlimit getrefcount
        getsizeof getswitchinterval gettrace intern is_finalizing setprofile setrecursionlimit
        setswitchinterval settrace""",
    "gc": """collect disable enable freeze get_count get_objects get_referents get_referrers
        get_stats is_tracked isenabled""",
    "traceback": """extract_stack extract_tb format_exc format_exception format_list print_exc
        print_exception print_stack walk_tb""",
    "warnings": """catch_warnings filterwarnings formatwarning resetwarnings showwarning
        simplefilter warn""",
    "logging": """FileHandler Filter Formatter Handler LogRecord Logger LoggerAdapter NullHandler
        StreamHandler addLevelName basicConfig captureWarnings debug disable error exception
        getLevelName getLogger info makeLogRecord shutdown warning""",
    "argparse": "Action ArgumentParser FileType HelpFormatter Namespace",
    "ast": """NodeTransformer NodeVisitor dump get_docstring increment_lineno iter_child_nodes
        literal_eval parse unparse walk""",
    "importlib": "import_module invalidate_caches reload",
    "socket": """create_connection create_server getaddrinfo getdefaulttimeout getfqdn
        gethostbyname gethostname getservbyname htonl htons inet_aton inet_ntoa inet_pton ntohl
        ntohs setdefaulttimeout socket socketpair""",
    "ipaddress": "IPv4Address IPv4Network collapse_addresses ip_address ip_interface ip_network",
    "urllib.parse": """parse_qs parse_qsl quote quote_plus unquote unquote_plus urldefrag
        urlencode urljoin urlparse urlsplit urlunparse""",
    "mimetypes": "add_type guess_extension guess_type",
    "platform": """architecture libc_ver machine node platform processor python_implementation
        python_version release system uname version""",
    "getpass": "getpass getuser",
    "filecmp": "clear_cache cmp cmpfiles dircmp",
}
